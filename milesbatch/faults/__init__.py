"""Breaking a run on purpose: named fault points, fault plans, the injector. Costs nothing when no plan is set."""
