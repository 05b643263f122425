"""The worker that routes generation requests to servers and brings new weights to them."""
