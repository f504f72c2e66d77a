"""What trainers of other packages need ready-made. Each file is named after the package that it imports; nothing else imports it."""
