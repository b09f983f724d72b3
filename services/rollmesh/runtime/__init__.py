"""Foundations of every service process: logs, metrics, health, gRPC, shutdown."""
