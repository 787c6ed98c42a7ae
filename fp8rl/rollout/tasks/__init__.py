"""Problems and the rewards of their answers: data, chat, environments, rewards."""
