"""Figures for people and programs: metrics, goals, tables, JSON and plots."""
