"""FastAPI on uvicorn, the model in the event loop."""

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from model import HOST, PORT, load

app = FastAPI()
run = load()


@app.post("/infer")
async def infer(request: Request) -> Response:
    x = np.frombuffer(await request.body(), np.float32)
    return Response(run(x[None]).tobytes(), media_type="application/octet-stream")


uvicorn.run(app, host=HOST, port=PORT, access_log=False, log_level="warning")
