"""What placement brings, in numbers and pictures."""
