"""What a step costs, in operations, bytes and seconds."""
