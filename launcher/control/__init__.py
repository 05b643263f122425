"""Control of running trials: stop, scale, exec, tell; and removal or replay of finished ones."""
