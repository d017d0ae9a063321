"""The Fast-LLM dialect: training configs and command lines of every release from 0.1.0 to the main
branch of 2026-07-20.
"""
