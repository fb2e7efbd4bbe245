#!/bin/bash
#SBATCH --job-name=milesbatch-tiny
#SBATCH --time=60
#SBATCH --chdir=/home/me/project
#SBATCH --output=/scratch/me/runs/tiny/logs/slurm-run-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --comment=mark:run
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --mem=320G
#SBATCH --account=kempner_mylab_lab
#SBATCH --exclude=holygpu1
#SBATCH --partition=kempner_h100

trap '' USR1
module load python

exec /venv/bin/python -u -m milesbatch.jobs.control /scratch/me/runs/tiny --cause 'by hand: `submit`'
