"""Profiles: measured times of a cluster's GPUs and links, in a file that planners and the simulator read.

    cluster_profile    the file: what it holds, how it is read, written and checked
    curves             times between measured sizes, and a note wherever a size is outside of them
    kernel_times       curves of the attention kernel; the table of the setting of this name
    shipped            profiles that come with the package, found by the name of a GPU
    measure            one process of `distca profile`: which of the files below measures what, in which order
    grid               sizes that are measured
    clock              seconds of a call
    attention          seconds of the attention kernel
    layers             seconds of everything in a layer but attention; products, copies, optimizer
    __main__           a process of `distca profile`: writes the file, and prints the few main numbers of it
    launch             `distca profile`: launches one process for each GPU

Exchanges and collectives are measured in `distca_hf.comm.measure_links`, which alone may open process groups.
"""
