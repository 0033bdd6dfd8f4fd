"""A policy that looks at the drafts, for replays; no strategy of the engine yet."""
