"""A few prompts of our own, from three domains, for measurements that need no data folder."""

PROMPTS = (
    "A baker sells 24 loaves in the morning and half as many in the afternoon. How many does he sell?",
    "Why is the sky blue?",
    "Write a Python function that returns the longest word of a sentence.",
    "Give me three tips for staying healthy.",
    "What is 15 percent of 240? Explain each step.",
    "Write a SQL query that counts the orders of each customer.",
    "Tell me a short story about a fox who wants to learn to swim.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Write a Python function that checks whether a string is a palindrome, with a docstring.",
    "What is the difference between a virus and a bacterium?",
    "If 3x + 7 = 22, what is x? Show your work.",
    "Write a C function that reverses an array of integers in place.",
    "List five things to do on a rainy day.",
    "A rectangle is 7 cm wide and 12 cm long. What are its area and its perimeter?",
    "Write a JavaScript function that removes duplicates from an array.",
    "Explain how a bicycle stays upright.",
)
