"""The generator service: serves one policy version at a time and follows the newest one."""
