"""The paper's figures: each a measurement, a picture and a JSON."""
