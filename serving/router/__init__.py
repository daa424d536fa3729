"""An OpenAI front before workers: a request goes to the data rank that it costs the least."""
