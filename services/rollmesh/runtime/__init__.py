"""What every service process stands on: logs, metrics, health, gRPC, shutdown."""
