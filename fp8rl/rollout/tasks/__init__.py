"""What is asked and what an answer is worth: data, chat, environments, rewards."""
