"""`demo`: what the chat demo asks, and the model it asks."""
