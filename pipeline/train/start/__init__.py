"""How a head begins: random, from the target's last layer, by least squares, or from an earlier head."""
