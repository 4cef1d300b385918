"""The launcher: plan, agent, failure and policy. The only package that imports ``torch.distributed.elastic``."""
