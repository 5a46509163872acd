"""Simulation: seconds of training steps on a cluster that was measured, in every way to share their attention.

    command         the arguments of `distca simulate`; tables in the terminal or JSON
    request, model  what is simulated: GPUs, documents of each step, sizes of the model
    simulation      all ways that are compared; each makes loads of a step's documents
    ways, planned   loads: of ways to compare with (what one is: compared), and of plans
    load            tokens of every rank, and seconds of its attention with what it waits for
    costs, wires    seconds of kernels and layers, of exchanges and collectives
    step, stages    seconds of a step from loads, under FSDP, and in the stages of a pipeline
    run, result     all steps in all ways; their figures, and the way to choose

Times come from `analysis.profiles`, schedules of a pipeline from `pipelines.schedules`. The equations are in
`docs/simulation.md`.
"""
