"""Files: written as a whole or not at all, and read without trusting what is in them."""
