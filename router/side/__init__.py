"""The router's side process: embeds prompts, searches past ones and trains, so that the router itself need not wait."""
