"""Where prompts made of segments enter SGLang's main process, and where results say what was reused."""
