"""Profiles: measured times of a cluster's GPUs and links, in a file that planners and the simulator read.

    cluster_profile    the file: what it holds, how it is read and written, how it is checked
    curves             times between measured sizes, and a note wherever a size is outside of them
    shipped            profiles that come with the package, found by the name of a GPU
    measure            one process of `distca profile`: which of the files below measures what, in which order
    attention          seconds of the attention kernel
    layers             seconds of everything in a layer but attention; products, copies, optimizer
    main_figures       the few numbers that are printed, as JSON and in words
    command            `distca profile`: launches one process for each GPU

Exchanges and collectives are measured in `distca_hf.comm.measure_links`, which alone may open process groups.
"""
