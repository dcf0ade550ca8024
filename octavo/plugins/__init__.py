"""octavo inside other trainers and serving engines; nothing imports them."""
