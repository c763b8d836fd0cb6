"""What the config.json of each model family says; without torch, since every part needs to know it."""
