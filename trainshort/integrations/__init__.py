"""Other people's packages, made to use attention from here. Each is imported only when a function here is called."""
