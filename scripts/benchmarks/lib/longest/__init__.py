"""What the search for the longest document that trains is made of."""
