#!/usr/bin/env bash
# Corpus, tokenizer, three training stages, sample, picture: `make quickstart` runs this with .venv/bin first in PATH.
# What is complete is not made again, so the same command goes on after an interruption.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1
export CUDA_VISIBLE_DEVICES= # the model is too small for a GPU, and two processes would need two

out=quickstart
recipe=examples/tiny/recipe.toml
started=$SECONDS
say() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - started)); }

say "corpus: this Python's own standard library"
if [ -f $out/corpus/prose.validation.jsonl ]; then # the last of the six
  echo "$out/corpus is there"
else
  python examples/tiny/build_corpus.py --output $out/corpus
fi

say "tokenizer: 2,048 pieces"
if [ -f $out/tokenizer.model ]; then
  echo "$out/tokenizer.model is there"
else
  python examples/tiny/train_tokenizer.py --input $out/corpus/{code,prose}.train.jsonl \
    --check $out/corpus/*.jsonl --output $out/tokenizer.model
fi

say "ids: one .bin/.idx pair per source"
for text in $out/corpus/*.jsonl; do
  prefix=$out/data/$(basename "$text" .jsonl)
  if [ -f "$prefix.bin" ] && [ -f "$prefix.idx" ]; then
    echo "$prefix is there"
  else
    mkdir -p $out/data
    python tools/preprocess_data.py --input "$text" --output-prefix "$prefix" \
      --tokenizer $out/tokenizer.model --append-eod
  fi
done

for stage in 1 2 3; do
  say "stage $stage: two processes"
  torchrun --standalone --nproc_per_node 2 pretrain.py --recipe $recipe --stage $stage
done

say "sample: the trained model continues two prompts"
for prompt in "def __init__(self" "This module"; do
  echo "--- $prompt"
  python tools/generate.py --checkpoint $out/run/stage-3 --prompt "$prompt" --temperature 0.6 --top-p 0.9
done | tee $out/sample.txt

say "picture"
python tools/plot_run.py $out/run --output $out/loss.png

say "check: did it learn?"
python examples/tiny/check_run.py $out/run

say "done"
cat <<END
corpus       $out/corpus/*.jsonl, as ids: $out/data/*.bin and *.idx
tokenizer    $out/tokenizer.model
run          $out/run/stage-N: metrics.jsonl, evaluations.jsonl, recipe.toml, checkpoints/
sample       $out/sample.txt
picture      $out/loss.png
Change examples/tiny/recipe.toml and run it again after 'make clean', or read the README on how to go on.
END
