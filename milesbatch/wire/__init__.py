"""How the roles talk to their controller: the messages, and the client's end."""
