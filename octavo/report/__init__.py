"""What a run says of itself: tables and pictures made from its configuration and from what it left."""
