"""What a person calls: words on the screen and exit codes. Everything else is below."""
