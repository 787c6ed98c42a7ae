"""Reads problems, lets the model answer them, and rewards the answers: data, chat, environments, rewards."""
