"""Pure decisions over numbers: who runs, how far drafts are verified. No torch, no I/O, no clock."""
