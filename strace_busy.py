import sys,time,os,subprocess
from pathlib import Path
sys.path.insert(0,'/tmp/w/store/tests'); sys.path.insert(0,'/tmp/w/store')
import tempfile
from real_trials import Trials, name_of
tmp=Path(tempfile.mkdtemp(prefix='fc-',dir='/tmp/w/labs')); root=tmp/'root'; root.mkdir()
t=Trials(root)
cost=['costs.actor_gen=0.3','costs.rew_inf=0.01','costs.ref_inf=0.03','costs.critic_inf=0.03','costs.actor_train=0.05','costs.critic_train=0.05']
f=t.launch('cost-ppo','a','--import','/tmp/w/store/tests/cost_plugin.py',*cost,'dataset.train_size=9600','dataset.train_bs_n_seqs=8','group_size=2','exp_ctrl.eval_freq_steps=none','exp_ctrl.total_train_epochs=1','cpus_per_model_worker=1')
try:
    v=t.wait_for_step(f,3)
    pid=[w.pid for w in v.workers if w.worker.startswith('master')][0]
    p=subprocess.Popen(['timeout','8','strace','-f','-y','-tt','-e','trace=file,desc','-o','/tmp/w/labs/master.st','-p',str(pid)]); p.wait()
    import time
finally:
    t.end_all(); import shutil; shutil.rmtree(tmp,ignore_errors=True)
