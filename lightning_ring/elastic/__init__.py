"""How a training goes on when ranks die or come."""
