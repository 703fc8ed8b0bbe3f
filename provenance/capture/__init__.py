"""Inside the user's call: look, never touch, never raise."""
