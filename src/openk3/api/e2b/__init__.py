"""The E2B protocol over the sandboxes of this machine, so that the stock `e2b` SDK runs here."""
