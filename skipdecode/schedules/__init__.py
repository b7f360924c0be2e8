"""Which sublayers run for which token, decided on the host before decoding starts. No torch."""
