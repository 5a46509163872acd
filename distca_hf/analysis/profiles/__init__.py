"""Profiles: measured times of a cluster's GPUs and links, in a file that planners and the simulator read.

    cluster_profile    the file: what it holds, how it is read, written and checked
    curves             times between measured sizes, and of the attention kernel; a note for sizes outside of them
    shipped            profiles that come with the package, found by the name of a GPU
    measure            one process of `distca profile`: which of the files below measures what, in which order
    grid               sizes that are measured
    clock              seconds of a call
    attention          seconds of the attention kernel
    layers             seconds of everything in a layer but attention; products, copies, optimizer
    measure_links      exchanges and collectives; measured_sends: what they send
    __main__           a process of `distca profile`: writes the file, and prints the few main numbers of it
    launch             `distca profile`: launches one process for each GPU

Of these only `measure_links` opens process groups.
"""
