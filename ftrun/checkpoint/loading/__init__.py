"""From stored pieces back to state: any tier, any number of ranks, any sharding."""
