"""What each layer of a model needs: the search for it (`search`), by measuring (`meter`)."""
