"""What a run's files say, put together for people and tools. Reads only; imports without torch."""
