import time
def test_a(project, monkeypatch):
    t=time.time()
    project.train("max_steps=12")
    print("train with proof x1", time.time()-t)
    import sd3_light.export.folder as f
    monkeypatch.setattr(f, "prove", lambda *a: {})
    t=time.time()
    project.train("max_steps=12", 'output_dir="b"')
    print("train without proof", time.time()-t)
    t=time.time()
    project.train("max_steps=12", 'output_dir="c"', "checkpoint_every_n_steps=100", "ema.enable=false")
    print("train without checkpoints", time.time()-t)
    t=time.time()
    project.build_cache(regenerate=True)
    print("cache", time.time()-t)
    import subprocess
    print(subprocess.run(["du","-sh",project.folder/"cache", project.folder/"run"],capture_output=True,text=True).stdout)
    print(project.losses())
