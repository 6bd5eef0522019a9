"""The glue between SGLang's runtime and the overlay. No mathematics here."""
