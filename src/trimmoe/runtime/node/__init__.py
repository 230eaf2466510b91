"""What one server process does: its share of the layers, of the experts and of the users."""
