"""Draft models behind the engine's Drafter protocol."""
