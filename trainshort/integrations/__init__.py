"""Other people's programs with our attention and models in them. Each is imported only when it is used."""
