"""Where keys and values are kept between steps."""
