"""`serve-spec bench drafters`: every drafter, in chains and in trees."""
