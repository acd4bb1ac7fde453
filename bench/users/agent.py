"""An agent's conversation with llama.cpp's server and ours, turn by turn in turns: agent.py OUT TURNS MODEL [on|off]"""
import json, re, socket, subprocess, sys, time, os, glob
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener
from pyorch import native
OUT, TURNS = sys.argv[1], int(sys.argv[2])
CTX = 65536
MODEL, FA = sys.argv[3], (sys.argv[4:] or ["on"])[0]
YARN = ["--rope-scaling", "yarn", "--rope-scale", "2", "--yarn-orig-ctx", "32768"]
def port():
    with socket.create_server(("127.0.0.1", 0)) as s: return s.getsockname()[1]
def post(p, path, body):
    r = Request(f"http://127.0.0.1:{p}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return build_opener(ProxyHandler({})).open(r, timeout=7200)
def up(p):
    for _ in range(1200):
        try:
            build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{p}/health", timeout=5); return
        except Exception: time.sleep(0.5)
    raise SystemExit("no server")
stock = native.built(True, ("llama-server",)) / "llama-server"
sides = {}
p = port()
sides[f"llama.cpp -fa {int(FA == 'on')}"] = (p, subprocess.Popen([stock, "-m", MODEL, "--host", "127.0.0.1", "--port", str(p), "-c", str(CTX), "-np", "1", "-t", "2", "-fa", FA, "-b", "2048", *YARN], stdout=open("agent-stock.log", "w"), stderr=subprocess.STDOUT))
p = port()
sides["sparq,ratio=1/4"] = (p, subprocess.Popen([sys.executable, "-m", "pyorch", "serve", MODEL, "--port", str(p), "--ctx", str(CTX), "--ratio", "1/4", "--rope-scaling", "yarn", "--rope-scale", "2", "-v"], stdout=open("agent-ours.log", "w"), stderr=subprocess.STDOUT))
files = sorted(glob.glob("/usr/lib/python3*/[a-z]*.py"), key=os.path.getsize)
files = [f for f in files if os.path.getsize(f) > 26000][:20]
messages = {n: [{"role": "system", "content": "You are a coding agent. Use the tool read_file to look at files."}, {"role": "user", "content": "Read the modules of the library one after another, and say after each in two sentences what it does. " + Path(files[-1]).read_text()[:4000]}] for n in sides}
try:
    for n, (p, _) in sides.items(): up(p)
    for turn in range(TURNS):
        for n in list(sides)[:: -1 if turn % 2 else 1]:
            p, m = sides[n][0], messages[n]
            if turn:
                text = Path(files[turn]).read_text()[:24000]
                m += [{"role": "tool", "tool_call_id": str(turn), "content": text}]
            body = {"messages": m, "max_tokens": 64, "temperature": 0, "stream": True, "cache_prompt": True, "ignore_eos": True}
            t0, first, got, last = time.perf_counter(), None, "", {}
            with post(p, "/v1/chat/completions", body) as a:
                for line in a:
                    if not line.startswith(b"data: {"): continue
                    e = json.loads(line[6:]); last = e.get("timings", last)
                    d = e["choices"][0]["delta"].get("content") if e.get("choices") else None
                    if d:
                        first = first or time.perf_counter() - t0; got += d
            total = time.perf_counter() - t0
            m += [{"role": "assistant", "content": got, "tool_calls": [{"id": str(turn + 1), "type": "function", "function": {"name": "read_file", "arguments": json.dumps({"path": files[turn + 1]})}}]}]
            row = {"side": n, "turn": turn, "prompt_n": last.get("prompt_n"), "cache_n": last.get("cache_n"), "first_s": first, "turn_s": total, "rate": last.get("predicted_per_second"), "sparse": last.get("sparse_attn")}
            print(json.dumps(row), flush=True); open(OUT, "a").write(json.dumps(row) + "\n")
finally:
    for _, s in sides.values(): s.terminate()
