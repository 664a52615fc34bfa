"""Other people's programs, with our models in them."""
