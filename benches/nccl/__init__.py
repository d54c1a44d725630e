"""The sharded clip over NCCL on several GPUs, from an installed wheel."""
